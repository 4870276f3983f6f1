"""What a run leaves on disk: its folder, checkpoints, and the rules by which it goes on."""
