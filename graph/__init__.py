"""What a model computes and what it needs: descriptions, checkpoints, the memory plan, the structured graph."""
