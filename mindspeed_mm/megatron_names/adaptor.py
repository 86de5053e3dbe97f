"""`mindspeed.megatron_adaptor`: imported for its patches, of which none is needed here."""
