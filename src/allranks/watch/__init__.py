"""What is wrong with a job that runs now, whoever started it? Looks from outside, and what follows from them."""
