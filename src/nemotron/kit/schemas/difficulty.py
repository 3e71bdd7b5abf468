"""How hard the tasks of each environment family are; the generators of nemotron.stack.environments take these classes.

Instances do not change, so that a cache may be keyed by them.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias, get_args

from pydantic import ConfigDict, Field, model_serializer, model_validator

from nemotron.kit.schemas.group import Group

Family = Literal[
    "math", "multiple_choice", "instruction_following", "structured_output", "code_generation", "workplace_assistant",
    "tool_comparison", "repository_repair",
]  # fmt: skip
ChoiceKind = Literal["largest", "smallest", "starts_with", "ends_with", "category", "odd_one_out"]
InstructionKind = Literal["repeat", "pick", "pick_not", "reorder", "first_last", "upper"]
CodeKind = Literal["number", "list_to_number", "list_to_list", "text"]
RepairStep = Literal["look", "edit", "run", "finish"]
WorkplaceKind = Literal["email", "calendar", "project_management", "customers"]
FAMILIES: tuple[Family, ...] = get_args(Family)
# What SFT and evaluation draw tasks of where a config names no families.
DEFAULT_FAMILIES: tuple[Family, ...] = ("math", "multiple_choice", "instruction_following", "structured_output")
# What RLVR draws of where a config names none. The two others are stages of their own: Super 3's SWE 1 and SWE 2.
RLVR_FAMILIES: tuple[Family, ...] = (*DEFAULT_FAMILIES, "code_generation", "workplace_assistant")


class FamilyDifficulty(Group):
    """The difficulty of one family."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="after")
    def _ranges_are_not_empty(self) -> Self:
        for name, low in self:
            high = getattr(self, name.replace("min_", "max_"))
            if name.startswith("min_") and low > high:
                raise ValueError(f"{name} {low} exceeds {name.replace('min_', 'max_')} {high}")
        return self


class MathDifficulty(FamilyDifficulty):
    """Integer arithmetic. Operands are uniform in 10^(min_digits - 1) .. 10^max_digits - 1."""

    min_digits: int = Field(2, ge=1, le=6, description="fewest digits of an operand")
    max_digits: int = Field(3, ge=1, le=6, description="most digits of an operand of + and -")
    multiply_digits: int = Field(2, ge=1, le=6, description="most digits of the number that is multiplied by 2..9")
    add: float = Field(0.5, ge=0, description="relative frequency of additions")
    subtract: float = Field(0.5, ge=0, description="relative frequency of subtractions")
    multiply: float = Field(0.0, ge=0, description="relative frequency of multiplications")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that work digit by digit")
    tool_share: float = Field(
        0.0, ge=0, le=1, description="share of problems whose prompt declares a calculator, which demonstrations call"
    )
    other_tool_share: float = Field(
        0.0, ge=0, le=1, description="share that declares a tool of no use instead, which demonstrations leave alone"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_digits > self.multiply_digits:
            raise ValueError(f"min_digits {self.min_digits} exceeds multiply_digits {self.multiply_digits}")
        if self.tool_share + self.other_tool_share > 1:
            raise ValueError(f"tool_share {self.tool_share} + other_tool_share {self.other_tool_share} exceed 1")
        if self.add + self.subtract + self.multiply <= 0:
            raise ValueError("one of add, subtract and multiply must be above 0")
        return self


class MultipleChoiceDifficulty(FamilyDifficulty):
    """Lettered options, one of them right."""

    kinds: tuple[ChoiceKind, ...] = Field(
        ("largest", "smallest", "category"), min_length=1, description="kinds of question, equally frequent"
    )
    num_options: int = Field(4, ge=3, le=6, description="options of a question")
    min_digits: int = Field(2, ge=1, le=9, description="fewest digits of the numbers compared")
    max_digits: int = Field(2, ge=1, le=9, description="most digits of the numbers compared")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that go through all options")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if "odd_one_out" in self.kinds and self.words_per_category < self.num_options - 1:
            raise ValueError("odd_one_out needs words_per_category >= num_options - 1")
        return self


class InstructionFollowingDifficulty(FamilyDifficulty):
    """Words written under constraints."""

    kinds: tuple[InstructionKind, ...] = Field(
        get_args(InstructionKind),
        min_length=1,
        description="kinds of instruction, equally frequent",
    )
    min_times: int = Field(2, ge=1, le=9, description="fewest repetitions of a word")
    max_times: int = Field(3, ge=1, le=9, description="most repetitions of a word")
    num_given: int = Field(4, ge=4, le=8, description="words given to pick from")
    num_reorder: int = Field(3, ge=3, le=8, description="words to reorder")
    max_count: int = Field(4, ge=3, le=8, description="longest list of different words asked for; the shortest is 3")
    num_upper: int = Field(2, ge=1, le=4, description="words to write in upper case")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    in_order_share: float = Field(
        0.75, ge=0, le=1, description="share of demonstrations in the order of the prompt; the others: any right order"
    )
    careful_share: float = Field(0.6, ge=0, le=1, description="share of demonstrations that number the words first")
    constraint_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of problems under constraints with IFEval's identifiers, in place of `kinds`",
    )


class StructuredOutputDifficulty(FamilyDifficulty):
    """JSON objects that validate under a small schema."""

    min_keys: int = Field(2, ge=1, le=6, description="fewest keys of an object")
    max_keys: int = Field(3, ge=1, le=6, description="most keys of an object")
    max_number: int = Field(99, ge=2, le=1_000_000_000, description="largest number; the smallest is 1")
    numbers_as_strings: bool = Field(True, description="a number may be asked for as a string")
    flags: bool = Field(True, description="boolean keys occur")
    choices: bool = Field(True, description="enumerated keys occur")
    words_per_category: int = Field(8, ge=2, le=16, description="values of a key that holds a word")
    careful_share: float = Field(0.6, ge=0, le=1, description="share of demonstrations that write typed values first")


class CodeGenerationDifficulty(FamilyDifficulty):
    """Functions of one line."""

    kinds: tuple[CodeKind, ...] = Field(
        get_args(CodeKind), min_length=1, description="what goes in and comes out, equally frequent"
    )
    max_steps: int = Field(2, ge=1, le=2, description="most operations with a constant, one after the other")
    max_number: int = Field(20, ge=2, le=100, description="largest constant; the smallest is 2")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that go operation by operation")


class WorkplaceDifficulty(FamilyDifficulty):
    """Requests that tools carry out, over several turns."""

    kinds: tuple[WorkplaceKind, ...] = Field(
        ("email", "calendar", "project_management", "customers"),
        min_length=1,
        description="databases that requests are about, equally frequent",
    )
    lookup_share: float = Field(
        0.5, ge=0, le=1, description="share of requests without an id, which a call has to look up first"
    )
    num_tools: int = Field(1, ge=1, le=27, description="tools in the prompt; as many as are needed where that is more")
    optional_parameters: bool = Field(False, description="list parameters of tools that a call may leave out")
    rows: int = Field(4, ge=2, le=64, description="rows of each of the five databases")


class RepairDifficulty(CodeGenerationDifficulty):
    """Repositories with a function of one line, as `CodeGenerationDifficulty` draws it, and a bug in it."""

    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that write both expressions")
    num_others: int = Field(1, ge=0, le=3, description="functions without a bug in the same file")
    search_share: float = Field(
        0.25, ge=0, le=1, description="share of requests that name no file: the function has to be searched for"
    )


class ToolComparisonDifficulty(RepairDifficulty):
    """Steps of repairs, each with what went before it."""

    steps: tuple[RepairStep, ...] = Field(
        get_args(RepairStep), min_length=1, description="what comes next, equally frequent; look: view or grep"
    )


Difficulty: TypeAlias = (
    MathDifficulty
    | MultipleChoiceDifficulty
    | InstructionFollowingDifficulty
    | StructuredOutputDifficulty
    | CodeGenerationDifficulty
    | WorkplaceDifficulty
    | ToolComparisonDifficulty
    | RepairDifficulty
)


class DifficultyConfig(Group):
    """How hard the tasks of each family are; a family left out has its defaults."""

    math: MathDifficulty | None = Field(None, description="integer arithmetic")
    multiple_choice: MultipleChoiceDifficulty | None = Field(None, description="lettered options")
    instruction_following: InstructionFollowingDifficulty | None = Field(None, description="words under constraints")
    structured_output: StructuredOutputDifficulty | None = Field(None, description="JSON under a schema")
    code_generation: CodeGenerationDifficulty | None = Field(None, description="functions of one line")
    workplace_assistant: WorkplaceDifficulty | None = Field(None, description="calls of tools over several turns")
    tool_comparison: ToolComparisonDifficulty | None = Field(None, description="the next call of a tool")
    repository_repair: RepairDifficulty | None = Field(None, description="a bug in a small repository")

    def get(self, family: str) -> Difficulty | None:
        """The difficulty of one family; None where its defaults are to be used."""
        groups: dict[str, Difficulty | None] = dict(self)
        return groups.get(family)

    @model_serializer
    def _without_defaults(self) -> dict[str, dict[str, Any]]:
        # So that a config that leaves all of this out stays as short as it was written.
        return {name: group.model_dump() for name, group in self if group is not None}
