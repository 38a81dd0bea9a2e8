"""What a framework is: who reduces what with whom, when, and by which names. One folder for each of them.

What is in this folder itself names none of them.
"""
