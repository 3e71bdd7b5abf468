"""A dataset of reasoning-gym (`pip install reasoning-gym`): its questions, and its own scoring."""

import reasoning_gym


class LegCounting:
    def __init__(self):
        self.dataset = reasoning_gym.create_dataset("leg_counting", size=2000, seed=1)

    def tasks(self):
        for index, entry in enumerate(self.dataset):
            yield {"prompt": entry["question"], "spec": {"index": index}, "answer": entry["answer"]}

    def verify_answer(self, spec, answer):
        return self.dataset.score_answer(answer, self.dataset[spec["index"]])
