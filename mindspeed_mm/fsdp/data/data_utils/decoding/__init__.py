"""Pictures, videos and sounds, from files to pixels and samples."""
