"""`python -m mindspeed_mm` is the command `mm`."""

from mindspeed_mm.cli.main import main

if __name__ == "__main__":
    main()
