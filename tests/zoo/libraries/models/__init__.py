"""The models, by field. A library is imported only when one of its models is built."""
