"""Lower precision: int8, int4 and half precision, within the limits of the gates."""
