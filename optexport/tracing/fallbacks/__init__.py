"""Alternative ways to trace a model that torch.export refuses."""
