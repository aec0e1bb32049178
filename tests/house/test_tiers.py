"""`make test` is a selection of the tests in which no family is without a test from end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Family -> a test of it from end to end, of which `make test` runs at least one case.
FAMILIES = {
    # each engine's source, read in place, then converted and compared
    "source of DeepSpeed": "engines/deepspeed/test_convert.py::test_converted_it_is_still_the_engines",
    "source of Megatron": "engines/megatron/test_source.py::TestMegatron::test_convert_and_read_back",
    "source of Megatron's FSDP": "engines/megatron/test_fsdp.py::TestMegatronFsdp::test_convert_and_read",
    "source of DCP": "engines/pytorch/test_dcp_source.py::TestDcp::test_convert_and_read_back",
    "source of torch.save": "engines/pytorch/test_torch_save.py",
    "source of safetensors": "engines/huggingface/test_safetensors.py",
    "source of Hugging Face": "engines/huggingface/test_source.py::TestTrainer",
    "source of Orbax": "engines/orbax/test_source.py::TestOrbax::test_convert_and_read_back",
    "source of Zarr": "engines/orbax/test_zarr.py::TestZarr::test_convert_and_read_back",
    "source of ByteCheckpoint": "engines/bytecheckpoint/test_source.py::TestByteCheckpoint::test_convert_and",
    "source of veRL": "engines/verl/test_source.py::TestVerl::test_convert_and_read_back",
    "source of NeMo AutoModel": "engines/automodel/test_source.py::TestAutomodel::test_convert_and_read_back",
    "source of offload folders": "engines/huggingface/test_offload.py::test_every_tensor_is_accelerates",
    "source of GGUF": "engines/gguf/test_gguf.py::TestGguf::test_convert_and_read_back",
    "source of torch_checkpointing": "engines/torch_checkpointing/test_source.py::TestTorchCheckpointing::test_convert",
    "source of slime": "engines/slime/test_source.py::TestSlime::test_convert_and_read_back",
    # each exporter, whose files the engine or its library loads
    "exporter of DeepSpeed": "engines/deepspeed/test_export_engines.py::test_deepspeed_loads_what_was_saved",
    "exporter of DeepSpeed's experts": "engines/deepspeed/test_export_moe.py::test_deepspeed_loads_what_was_saved",
    "exporter of Megatron": "engines/megatron/test_export.py::test_every_layout_becomes_one",
    "exporter of DCP": "engines/pytorch/test_dcp_export.py::test_fsdp2_resumes_at_other_world_sizes",
    "exporter of torch.save": "engines/pytorch/test_torch_save_export.py",
    "exporter of safetensors": "engines/huggingface/test_export.py::test_from_pretrained_has_equal_logits",
    "exporter of Orbax": "engines/orbax/test_export.py::test_a_tree_of_orbax_goes_back",
    "exporter of GGUF": "engines/gguf/test_gguf.py::test_an_export_is_the_same_file",
    "exporter of NumPy": "engines/numpy/test_export.py",
    "an export to an object store": "exporters/test_objects.py::test_the_bytes_are_those_on_a_disk",
    # each live integration
    "engines of DeepSpeed": "engines/deepspeed/live/test_engines.py::test_training_goes_on_as_if_it_had",
    "Megatron-Core": "engines/megatron/live/test_layouts.py::test_a_training_goes_on_under",
    "trainers of Hugging Face": "engines/huggingface/test_live.py::test_hugging_face",
    "Lightning": "engines/lightning/test_live.py::test_lightning",
    "torch_checkpointing": "engines/torch_checkpointing/test_live.py::test_our_manager",
    "torchtitan": "engines/torchtitan/test_live.py::test_torchtitan",
    "JAX": "jax/test_resume.py::test_the_guide_and_what_it_claims",
    "processes of JAX": "jax/test_processes.py::test_two_processes_with_two_devices_each",
    "modules of FSDP1": "torch/test_fsdp1.py::test_each_kind_saves_what_one_process_has",
    "stages of a pipeline": "torch/test_torch_states.py::test_several_stages_on_a_rank",
    "stock loaders": "torch/integrations/test_stock_loaders.py::test_a_model_of_a_trainer_is_loaded",
    "the classes of DCP": "engines/pytorch/test_dcp_layouts.py::test_what_is_saved_is_what_was_held",
    "the guides": "torch/test_guides.py::test_fsdp2",
    "journeys": "torch/test_journeys.py::test_a_guide_as_it_is_lived",
    # saving in each form, and loading
    "saved as arrays and packed": "torch/test_matrix.py::test_what_is_saved_is_what_was_held",
    "loaded under another layout": "torch/test_matrix.py::test_a_loaded_training_is_the_saved_one",
    "saved as safetensors": "torch/test_in_place.py::test_transformers_loads_what_was_trained",
    "saved in one file on S3": "torch/test_in_place_stores.py::test_ranks_write_one_file",
    "saved in the background": "torch/test_faults.py::test_saves_in_the_background",
    "killed while it is saved": "torch/test_faults.py::test_a_rank_is_killed_in_a_save",
    "a manager": "torch/test_manager.py::test_two_ranks_agree",
    "loaded into a model": "torch/test_load_into.py::test_logits_are_those_of_the_model",
    "captured from a loader": "torch/test_capture.py::TestAServingRank::test_reads_its_own_bytes",
    "published, and received": "torch/test_publishing.py::test_receivers_that_are_killed_never",
    "ranks that share reads": "torch/test_sharing.py::test_each_host_reads_once",
    # each job
    "convert": "jobs/test_convert.py::test_every_tensor_survives_bit_for_bit",
    "copy": "jobs/test_copy.py::test_there_and_back_through_an_object_store",
    "verify": "jobs/test_verify.py::test_every_mutation_is_found",
    "materialize": "jobs/test_materialize.py::TestInPlace::test_all_of_it_stays_but_the_packed_files",
    "patch": "jobs/test_patch.py::test_a_chain_is_written_folded_and_made_whole",
    "thin": "jobs/test_thin.py::TestWhatIsLeft::test_only_the_states_are_gone",
    "register": "jobs/test_register.py::test_a_tree_of_everything",
    "virtual checkpoints": "jobs/test_virtual.py::test_it_reads_as_its_source_does",
    "gc": "jobs/test_gc.py::test_a_deleted_checkpoint_is_purged_and_others_stay",
    "compare": "jobs/test_compare.py::test_foreign_and_universal_in_any_cut_are_equal",
    "fits": "jobs/test_fits.py",
    "doctor": "jobs/test_doctor.py::TestWholePlaces::test_an_object_store",
    "weights": "jobs/test_weights.py::test_the_command",
    "parts of a job": "jobs/test_parts.py::test_any_order_of_parts",
    "a job on Dask": "jobs/test_cluster.py::test_convert_copy_verify_and_resume",
    "a combination on Dask": "jobs/combine/test_cluster.py::test_on_dask_and_in_parts",
    "a job under torchrun": "jobs/combine/test_cluster.py::test_under_torchrun",
    "merges and averages": "jobs/combine/test_combine.py",
    "a killed job": "jobs/test_crash.py::test_kill_9_at_any_instant",
    "export": "exporters/test_export.py",
    # each area of the catalog
    "recording": "catalog/test_behaviour.py",
    "filters": "catalog/filter/test_agreement.py::test_every_filter_is_what_python_says",
    "SQL": "catalog/test_sql.py::test_queries_of_all_forms",
    "lineage": "catalog/test_lineage.py::test_every_step_is_there_once",
    "differences": "catalog/test_diff.py",
    "retention": "catalog/test_retention.py",
    "deletion": "catalog/test_purge.py::test_a_checkpoint_is_purged_after_its_grace",
    "migrations": "catalog/test_migrations.py::test_an_older_database_waits_for_an_upgrade",
    "launches": "catalog/test_lines.py::test_launches_against_a_model",
    "a catalog that many use": "catalog/test_stress.py::test_many_that_work_at_once_lose_nothing",
    "plans of queries": "catalog/test_plans.py::test_no_method_reads_a_whole_table",
    # each storage back end
    "local files": "storage/test_stores.py::TestLocalStore",
    "memory": "storage/test_stores.py::TestMemoryStore",
    "fsspec": "storage/test_stores.py::TestFsspec",
    "S3": "storage/test_stores.py::TestObjectStore",
    "cached stores": "storage/test_cache_stores.py",
    "uploads in parts": "storage/test_multipart.py::test_parts_of_several_processes",
    "lost answers of stores": "storage/test_lost_commits.py",
    # the rest
    "commands": "cli/test_convert.py",
    "views": "views/test_sub_models.py::test_any_steps_make_what_numpy_makes",
    "Zarr's readers": "format/test_zarr.py::test_foreign_readers_read_what_we_write",
    "the store for zarr-python": "zarr_store",
    "a run as arrays": "runs/test_run.py::test_a_slice_is_the_stack_of_single_reads",
    "the store of a run": "runs/test_run_store.py::test_xarray_selects_by_step",
    "the second reader": "conformance/test_conformance.py::test_what_a_reader_makes_of_it",
    "checkpoints of earlier releases": "golden/test_golden.py",
    "schedules": "schedules/test_schedules.py::test_what_was_mended_stays_so",
    "hostile files": "fuzz/test_corpus.py",
}


@pytest.fixture(scope="module")
def in_front() -> list[str]:
    """The ids of what `make test` runs in the files of the families."""
    files = sorted({f"tests/{test.partition('::')[0]}" for test in FAMILIES.values()})
    options = [
        "--collect-only",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-m",
        "not matrix",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_family_has_a_test_from_end_to_end_in_front(in_front: list[str]) -> None:
    without = {
        family: test
        for family, test in FAMILIES.items()
        if not any(found.startswith(f"tests/{test}") for found in in_front)
    }
    assert without == {}
