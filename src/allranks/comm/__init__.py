"""What does the network carry, what would make training on it faster, and how is less sent over it?"""
