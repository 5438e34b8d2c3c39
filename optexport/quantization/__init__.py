"""Lower precision: int8 and half precision, within the limits of the gates."""
