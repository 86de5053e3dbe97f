"""Pipeline parallelism: a model cut into stages, driven by torch's schedules."""
