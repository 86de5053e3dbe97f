"""`--nproc`: ranks on this host, started without torchrun's command line."""
