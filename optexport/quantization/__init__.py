"""Lowers files to fewer bits, as far as the gates on their decisions allow."""
