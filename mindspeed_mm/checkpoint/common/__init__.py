"""What all converters have in common: their base class and the configuration of their subcommands."""
