"""`nemotron env serve` as a resources server that Gym starts, at the address that Gym gives it."""

import os

from nemo_gym.global_config import get_first_server_config_dict, get_global_config_dict

config = get_first_server_config_dict(get_global_config_dict(), os.environ["NEMO_GYM_CONFIG_PATH"])
address = ["--host", config["host"], "--port", str(config["port"])]
os.execvp(config["program"], [config["program"], "env", "serve", config["family"], *address])
