"""A server that speaks as OpenAI's does: `mm serve`."""
