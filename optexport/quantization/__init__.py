"""Lower precision: int8 and half precision, within the gates."""
