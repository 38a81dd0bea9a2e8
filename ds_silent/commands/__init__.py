"""What the commands of the command line say before, and write after."""
