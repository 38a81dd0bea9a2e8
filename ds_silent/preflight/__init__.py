"""What must agree between the ranks before step 1, and who is the odd one out."""
