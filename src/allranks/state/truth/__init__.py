"""Do all ranks still have the same bits, and if not, which rank is the odd one?"""
