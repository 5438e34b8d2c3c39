"""What rules ask of a graph, and what several of them do to it."""
