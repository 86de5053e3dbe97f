"""`mm export` and `mm merge`: folders of weights that other libraries read."""
