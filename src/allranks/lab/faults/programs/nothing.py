"""The job of a healthy start: the test is over before the program begins."""
