"""`mm ui`: the runs of a folder in a browser, a form that makes configurations, and runs that are started from it."""
