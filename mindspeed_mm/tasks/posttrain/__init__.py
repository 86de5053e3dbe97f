"""`mm posttrain`: what comes before and after training on preferences and rewards."""
