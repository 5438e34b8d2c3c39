"""What is to blame for a failed proof, and what is left to see it again."""
