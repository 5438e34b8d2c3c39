"""What is kept between runs, by content: a second run, and one that goes on after it was killed, take it from there."""
