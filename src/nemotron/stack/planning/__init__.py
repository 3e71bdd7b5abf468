"""What a training takes, in closed form. Read layout, memory, speed, rl_step, then reading and search."""
