"""What a framework is: who reduces what with whom, and when. One folder for each of them."""
