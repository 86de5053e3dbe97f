"""DreamBooth by the flags of diffusers' scripts: a few pictures of one thing, and pictures of its class beside them."""
