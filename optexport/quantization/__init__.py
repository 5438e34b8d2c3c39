"""Lower precision: int8 and half precision, is_within the gates."""
