"""Runs in an environment of NeMo Gym's: one of its servers, or rollouts as NeMo-RL has Gym collect them.

    python gym_servers.py serve NAME             # a server of the global config, until it is ended
    python gym_servers.py collect RECORDS        # results as JSON lines, in the order of the records

The global config is in the variable NEMO_GYM_CONFIG_DICT, as for Gym's own processes. Its `ng_run` would make an
environment for each server; here they share this one.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvicorn
from nemo_gym.global_config import get_first_server_config_dict, get_global_config_dict
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import HeadServer, ServerClient
from omegaconf import OmegaConf
from resources_servers.mcqa.app import MCQAResourcesServer
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.vllm_model.app import VLLMModel

CLASSES = {"vllm_model": VLLMModel, "simple_agent": SimpleAgent, "mcqa": MCQAResourcesServer}


def serve(name):
    everything = get_global_config_dict()
    (app_name,) = next(iter(everything[name].values()))
    server_class = CLASSES[app_name]
    values = OmegaConf.to_container(get_first_server_config_dict(everything, name), resolve=True)
    config = server_class.model_fields["config"].annotation.model_validate({**values, "name": name})
    client = ServerClient(head_server_config=ServerClient.load_head_server_config(), global_config_dict=everything)
    server = server_class(config=config, server_client=client)
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    uvicorn.run(app, host=config.host, port=config.port, log_level="warning")


async def collect(path):
    head, _, _ = HeadServer.run_webserver()
    while not head.started:
        await asyncio.sleep(0.05)
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    collected = [await task for task in RolloutCollectionHelper().run_examples(rows)]
    results = {row["_rowidx"]: result for row, result in collected}
    for number in sorted(results):
        print(json.dumps(results[number]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        asyncio.run(collect(sys.argv[2]))
