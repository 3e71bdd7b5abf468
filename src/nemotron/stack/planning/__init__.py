"""What a training at the published size would take: memory of a GPU, time, money. Closed forms, no torch."""
