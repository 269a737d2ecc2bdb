"""`orbit validate`: is this manifest right, do the prompts and rewards that it names exist, and what does it say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orbit_runtime.cli.output import AsJson, Manifest, Overrides, format_json, format_table
from orbit_runtime.errors import OrbitError, UnsupportedError

if TYPE_CHECKING:
    from orbit_runtime.spec import OrbitRun


def validate(file: Manifest, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a manifest and list everything that is wrong with it. Opens local prompts and rewards.

    \f
    Raises:
        ManifestError: with every problem of the file; or a function of the user's cannot be imported or called.
        UnsupportedError: (78) what is supported on no machine, as `orbit plan` says it; or, where the model's headers
            are on this machine, a type of model that Orbit does not train, an adapter that servers cannot apply, or
            sizes that do not divide the model.
        ModelError: (66) no model of that name, or in that precision, ships with Orbit; or a folder is of a dtype that
            Orbit does not read, or names an end-of-sequence token that the model does not have; or its template
            writes such a token.
        DataError, UsageError: prompts or code on this machine are not there, or not what the manifest says; or a prompt
            holds a token for which the model has no embedding.
    """
    from orbit_runtime.algorithms.custom_loss import check_own
    from orbit_runtime.api.checks import local_model
    from orbit_runtime.environments.targets import check_local_inputs, code_path
    from orbit_runtime.evaluation.tasks import naming_fields, task_specs
    from orbit_runtime.model_info.builtin_models import builtin_folder
    from orbit_runtime.planner.verdict import check_support
    from orbit_runtime.spec import MachineFacts, load_manifest, resolve
    from orbit_runtime.spec.description import find_warnings

    run = load_manifest(file, overrides or [])
    # The identity is the same on every machine; only relative paths need a folder to start from.
    resolved = resolve(run, MachineFacts(has_cuda=False, num_gpus=0), folder=file.resolve().parent)
    check_support(run, None)
    if run.spec.model.uri.startswith("builtin://"):
        builtin_folder(run.spec.model.uri.removeprefix("builtin://"), run.spec.model.precision)
    folders = [str(file.resolve().parent), str(Path.cwd())]
    unopened = check_local_inputs(resolved.run.spec, folders)
    if run.spec.evaluation.environments and run.spec.algorithm.type != "SFT":
        for name, spec in task_specs(run.name, resolved.run.spec).items():
            with naming_fields(resolved.run.spec, name):
                unopened += check_local_inputs(spec, folders)
    model = local_model(resolved.run, file.resolve().parent)
    absent = None if model is None or model.is_dir() else model
    if absent is not None:
        unopened = [resolved.run.spec.model.uri, *unopened]
    if resolved.run.spec.environment.code is None or code_path(resolved.run.spec):
        unopened += check_own(resolved.run.spec.algorithm, [*code_path(resolved.run.spec), *folders])
    unchecked, warning = _check_model(run, file.resolve().parent), "; ".join(find_warnings(run.spec))
    refused = _refusal(run, file.resolve().parent)
    if model is not None and absent is None:
        _check_tokens(resolved.run, model)
    if as_json:
        said = {"valid": True, "name": run.name, "identity": resolved.identity}
        told = {"warning": warning, "refused_here": refused}
        found = {name: each for name, each in told.items() if each}
        print(format_json({**said, "not_opened": unopened, "not_checked": unchecked, **found}))
        return
    print(format_table(("field", "value"), [*_summary(run), ("identity", resolved.identity)]))
    if unopened:
        print(f"\nnot opened, as it is not on this machine: {', '.join(dict.fromkeys(unopened))}")
    for each in unchecked:
        print(f"\nnot checked, see `orbit plan`: {each}")
    if warning:
        print(f"\nwarning: {warning}")
    print(f"\n{file} is valid")
    if refused:
        print(f"but not on this machine: {refused}")
    if absent is not None:
        print(f"but its model is not on this machine: `orbit run` ends here until the folder {absent} exists")


def _check_tokens(run: OrbitRun, folder: Path) -> None:
    """Tokenises prompts, where the tokenizer is here and has tokens that the model lacks: most have none."""
    from importlib.util import find_spec

    from orbit_runtime.data.chat import ChatTokenizer, exceeds_embedding
    from orbit_runtime.environments.targets import check_tokens
    from orbit_runtime.evaluation.tasks import task_specs

    if not exceeds_embedding(folder) or find_spec("transformers") is None:
        return
    tokenizer = ChatTokenizer(folder, run.spec.data.chat)
    for spec in (run.spec, *task_specs(run.name, run.spec).values()):
        check_tokens(spec, tokenizer.encode_many)


def _check_model(run: OrbitRun, folder: Path) -> list[str]:
    """Checks what depends on the model, if its headers are on this machine.

    Returns what of the manifest's parallel sizes only `orbit plan` can know, for it asks elsewhere, or is where the run
    will be."""
    from orbit_runtime.api.checks import local_facts, local_model
    from orbit_runtime.data.chat import named_eos_ids
    from orbit_runtime.model_info.checkpoint import PlainDtypeError
    from orbit_runtime.model_info.module_tree import UnknownTypeError
    from orbit_runtime.planner.verdict import check_sizes, check_support, has_sizes

    uri = run.spec.model.uri
    try:
        model, why = local_facts(run, folder), "which is not on this machine"
    except UnknownTypeError as error:
        return [error.message]
    except (UnsupportedError, PlainDtypeError):
        raise
    except OrbitError as error:
        model, why = None, f"whose headers cannot be read here: {error.message}"
    if model is not None:
        check_support(run, model)
        if (place := local_model(run, folder)) is not None:
            named_eos_ids(place)
    if not has_sizes(run):
        return []
    if model is None:
        return [f"whether parallel sizes divide {uri}, {why}"]
    if check_sizes(run, model):
        return []
    return ["whether parallel sizes suit the GPUs of the machine, which the manifest does not name"]


def _refusal(run: OrbitRun, folder: Path) -> str:
    """Why `orbit run` would refuse it here, in the words of `orbit plan`; empty if it would not, or if the model's
    headers are not on this machine."""
    from orbit_runtime.api.checks import local_facts, local_model
    from orbit_runtime.cli.plan import find_machine
    from orbit_runtime.planner import judge

    place = local_model(run, folder)
    if not (run.spec.model.uri.startswith("builtin://") or (place is not None and place.is_dir())):
        return ""
    try:
        model = local_facts(run, folder)
        verdict = judge(run, model, find_machine(run, None)) if model else None
    except OrbitError:
        return ""
    problem = verdict.problem if verdict and verdict.accepted is False else None
    return f"{problem.message} ({problem.where}: {problem.fix})" if problem else ""


def _summary(run: OrbitRun) -> list[tuple[str, str]]:
    from orbit_runtime.spec.description import describe_algorithm

    spec = run.spec
    adapter, training = spec.adapter, spec.training
    if adapter.lora is not None:
        settings = f"rank {adapter.lora.rank}, alpha {adapter.lora.alpha:g}"
    else:
        settings = f"block size {adapter.oft.block_size}, {adapter.oft.parametrization}" if adapter.oft else ""
    targets = f"{len(adapter.targets)} targets" if adapter.targets else "the family's usual targets"
    batch = f"{training.prompts_per_step} prompts x {spec.algorithm.group_size} samples"
    if spec.algorithm.type == "SFT":
        learned = f"{training.steps} of {training.prompts_per_step} demonstrations"
    else:
        tokens = spec.rollout.sampling.max_new_tokens
        length = f"up to {tokens} tokens each" if tokens else "as long as the prompts leave room for"
        learned = f"{training.steps} of {batch}, {length}"
    return [
        ("name", run.name),
        ("model", f"{spec.model.uri} ({spec.model.precision})"),
        ("adapter", f"{adapter.type}: {settings}, {targets}"),
        ("algorithm", describe_algorithm(spec.algorithm)),
        ("prompts", ", ".join(each.uri for each in spec.data.prompts)),
        ("rewards", ", ".join(f"{each.name} ({each.type or each.entrypoint})" for each in spec.environment.rewards)),
        ("steps", learned),
        ("trainer, engine", f"{training.trainer}, {spec.rollout.engine}"),
        ("run folder", f"{spec.storage.uri.rstrip('/')}/{run.name}"),
    ]
