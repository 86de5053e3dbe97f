"""Classes of libraries that are made ready for sharding (`FSDP2Mixin`)."""
