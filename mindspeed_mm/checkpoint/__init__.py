"""Weight formats and conversion: key maps, readers and writers for each layout."""

if __name__ == "checkpoint":  # through the checkout's link `checkpoint -> mindspeed_mm/checkpoint`
    from mindspeed_mm.checkpoint.alias import install_alias

    install_alias(__name__, "mindspeed_mm.checkpoint")
