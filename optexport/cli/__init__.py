"""Commands of the ``optexport`` program."""
