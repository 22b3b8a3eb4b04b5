"""The job of a healthy start: what is looked at is over before it begins."""
