"""What tracing tries when torch.export refuses a model."""
