"""`mm check`: everything that training would refuse, told before it starts."""
