"""`mm evaluate --harness`: lmms-eval and VLMEvalKit ask a model behind a server; their figures are read back."""
