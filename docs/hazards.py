"""Prints docs/hazards.md: what can go wrong when an arbitrary forward is captured, and what graphprobe does about it.

python docs/hazards.py > docs/hazards.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

G = "tests/test_graphs.py::"
H = "tests/test_hazards.py::"
GPU = "tests/gpu/test_cuda.py::"
CAPTURE = "tests/gpu/test_cases_capture.py::"
MEMORY = "tests/gpu/test_cases_memory.py::"
OUTPUT = "tests/gpu/test_cases_output.py::"
THREADS = "tests/gpu/test_cases_threads.py::"
TIMING = "tests/gpu/test_cases_timing.py::"
TWO = "tests/gpu/test_two_gpus.py::"


@dataclass(frozen=True)
class Hazard:
    """One row.

    ``detected``: "yes" (handled, or noticed before a result is wrong), "late" (noticed within ``bound``) or "no"; then
    ``verify`` says what ``verify=`` does about it. ``reason`` is the fallback reason that it shows up as, None where
    no call runs eagerly for it. ``tests`` are pytest node ids.
    """

    number: int
    hazard: str
    does: str
    reason: str | None
    detected: str
    tests: tuple[str, ...]
    bound: str = ""
    verify: str = ""


HAZARDS = (
    Hazard(
        1,
        "A number, text or flag among the arguments is baked into the launches",
        "It is part of the signature, by type and value: another value warms up and is captured for itself, up to "
        "`max_graphs` (then `graph_limit`). After `warmup` the set is closed, and another value is eager.",
        "signature",
        "yes",
        (
            G + "test_a_new_signature_is_captured_like_the_first",
            "tests/cases/test_wrong_output.py::test_another_number_never_meets_a_graph",
            "tests/cases/test_memory.py::test_a_thousand_kinds_of_calls_make_max_graphs_graphs",
        ),
    ),
    Hazard(
        2,
        "None instead of a tensor, another structure, another order of keys",
        "The structure with its keys in their order is part of the signature. An argument of a class that cannot be "
        "looked into keeps the call eager, and the cause names it.",
        "signature",
        "yes",
        (
            G + "test_arguments_in_containers",
            G + "test_dictionaries_in_another_order_are_another_call",
            G + "test_an_opaque_argument",
            "tests/cases/test_shapes.py::test_a_mask_never_meets_the_maskless_graph",
        ),
    ),
    Hazard(
        3,
        "The inputs lie elsewhere at each call",
        "Inputs are copied into static inputs at each call. What `static=` names is read where it is and compared by "
        "its address at each call: elsewhere it is another signature; one that is new at each call is said to move.",
        "static_moved",
        "yes",
        (
            G + "test_exact_buckets",
            G + "test_layouts",
            G + "test_static_arguments",
            G + "test_a_static_argument_that_is_new_at_each_call_is_said_to_move",
        ),
    ),
    Hazard(
        4,
        "Results in dicts, dataclasses, ModelOutput, or in a class of the engine's own",
        "Tuples, named tuples, lists, dicts, dataclasses and ModelOutput come back as such, with their constants; an "
        "object that was passed by reference (a cache) comes back as itself. Any other class is no graph.",
        "capture_failed",
        "yes",
        (
            G + "test_results_in_containers",
            G + "test_model_outputs",
            H + "test_a_static_cache_passed_by_reference_gives_eagers_tokens",
            H + "test_a_result_that_cannot_be_taken_apart_keeps_the_call_eager",
        ),
    ),
    Hazard(
        5,
        "The next replay overwrites an earlier result",
        "A result is a clone, cut to the caller's rows. `outputs=\"alias\"` hands out the graph's memory, on request. "
        "Memory of the caller's is handed back as it is.",
        None,
        "yes",
        (
            G + "test_a_result_is_the_callers_own",
            G + "test_alias",
            "tests/test_outputs.py::test_a_tensor_from_outside_is_handed_out_as_it_is",
            GPU + "test_a_result_is_not_overwritten_by_the_next_call",
        ),
    ),
    Hazard(
        6,
        "Buckets share one pool: another bucket's replay writes over this one's outputs",
        "A result is cloned right behind its replay, before another graph has its turn, so replays may come in any "
        'order. With `outputs="alias"` every graph keeps its outputs, and no later capture gets their memory.',
        None,
        "yes",
        (
            GPU + "test_buckets_of_one_pool_replay_in_any_order",
            THREADS + "test_two_threads_replay_the_graphs_of_one_pool_in_any_order",
        ),
    ),
    Hazard(
        7,
        "The order of captures fragments the pool",
        "`warmup` captures largest first, on one stream, into one pool. Lazy capture takes the order of the traffic.",
        None,
        "yes",
        (
            G + "test_warmup_reports_and_closes_the_set",
            GPU + "test_warmup_captures_largest_first_and_closes_the_set",
            MEMORY + "test_all_buckets_need_little_more_than_the_largest",
        ),
    ),
    Hazard(
        8,
        "inference_mode and no_grad, and calls that take part in autograd",
        "Both flags are part of the signature; static inputs are normal tensors, so either mode may fill them. With "
        "grad enabled, an input, parameter or result that requires grad keeps the call eager.",
        "grad",
        "yes",
        (
            G + "test_modes_have_their_own_graphs",
            G + "test_grad_of_arguments",
            G + "test_grad_of_what_the_forward_closes_over",
            "tests/test_staging.py::test_a_buffer_made_in_inference_mode_can_be_written_outside",
        ),
    ),
    Hazard(
        9,
        "Training mode, of the module or of one layer",
        "The module's own flag is looked at in every call. The flag of a layer is compared on a schedule; then the "
        "graph is made anew (`static_moved`).",
        "training",
        "late",
        (
            G + "test_training",
            H + "test_a_layer_that_goes_into_training_mode_is_noticed_within_the_check",
        ),
        bound="a layer: 64 calls of a batch size, at most ten looks a second",
    ),
    Hazard(
        10,
        "Random numbers: private generators, seeds drawn on the host",
        "Replays draw what eager would draw. A `torch.Generator` of one's own must be named in `generators=`; without "
        "that it is no graph, and neither is a forward that seeds. A number that Python draws is baked: see 12.",
        "capture_failed",
        "yes",
        (
            G + "test_random_numbers_are_eagers",
            "tests/test_recorder.py::test_a_generator_that_was_not_declared_is_refused",
            OUTPUT + "test_a_seed_gives_a_graph_the_numbers_that_it_gives_eager",
            OUTPUT + "test_a_generator_that_was_not_given_is_not_frozen",
            H + "test_a_forward_that_seeds_is_no_graph",
        ),
    ),
    Hazard(
        11,
        "The host needs a value: `.item()`, a branch on a tensor, `nonzero`, a mask, a slice by a tensor, `.cpu()`",
        "The eager run before a capture is watched; what needs the host, or has a shape that depends on data, is no "
        "graph, and the cause has file and line. What only the driver sees fails the capture, with the first cause.",
        "capture_failed",
        "yes",
        (
            H + "test_a_forward_that_needs_a_value_on_the_host_is_no_graph",
            H + "test_a_constant_that_the_forward_makes_is_part_of_the_graph",
            H + "test_an_operator_of_operators_never_breaks_a_call",
            "tests/cases/test_capture_failure.py::test_the_cause_names_the_line_that_reads_on_the_host",
            GPU + "test_a_capture_that_the_driver_refuses_is_survived",
        ),
    ),
    Hazard(
        12,
        "State of Python's: counters, flags, step numbers",
        "A forward that sets an attribute of its module or object at each call is no graph (`signature`, with the "
        "name). Numbers, texts and flags of modules are compared every 64 calls, ten times a second at most "
        "(`static_moved`). Other state, in a closure, a global, a class, is not seen.",
        "verify_failed",
        "no",
        (
            H + "test_what_only_python_knows_is_found_by_verification",
            "tests/cases/test_wrong_output.py::test_a_forward_that_sets_an_attribute_stays_eager",
            "tests/cases/test_weights.py::test_a_switch_of_the_model_is_noticed_within_the_bound",
            H + "test_attention_is_verified",
        ),
        verify="compares one call in N: eager's result is handed out, the graph given up. Not where the forward draws "
        "random numbers, or writes outside without `state=`: the cause says so",
    ),
    Hazard(
        13,
        'Code that asks "am I capturing" takes another path in the capture than in eager',
        "A capture does not look like compiling, tracing or scripting, so such code takes eager's path. Code that asks "
        "the stream whether it is capturing gets its answer, and the graph holds the other path.",
        "verify_failed",
        "no",
        (
            H + "test_a_capture_does_not_look_like_tracing_or_compiling",
            H + "test_what_only_python_knows_is_found_by_verification",
        ),
        verify="compares one call in N, and gives a graph with the other path up",
    ),
    Hazard(
        14,
        "Warm-up has side effects: the position of a cache, lengths, the state of an SSM",
        "In traffic the forward runs once per call, the capturing call included. `warmup` runs it eagerly once per "
        "bucket: tensors named in `state=` are put back afterwards, others have moved; or give it scratch inputs.",
        None,
        "no",
        (
            G + "test_state_written_in_place_is_written_once_per_call",
            G + "test_the_forward_runs_exactly_once_per_call",
            G + "test_warmup_puts_state_back",
            H + "test_warm_up_moves_the_position_of_a_cache_unless_it_is_state",
        ),
        verify="does nothing here: warm-up is over when it compares. It restores `state=` around its second run",
    ),
    Hazard(
        15,
        "Pad rows write into a cache",
        "Exact match is the default. A forward that writes outside its inputs is not padded by one word, only by a "
        "dict that names each argument's fill, a scratch slot for instance. A static argument is never padded.",
        "no_exact_bucket",
        "yes",
        (
            G + "test_one_word_is_refused_where_pad_rows_would_land_outside",
            G + "test_an_argument_that_follows_without_a_rule_is_not_padded",
            "tests/test_bad_input.py::test_padding_of_a_static_argument",
            "tests/cases/test_wrong_output.py::test_pad_rows_write_into_the_scratch_slot_alone",
        ),
    ),
    Hazard(
        16,
        "Pad rows reach what rows share: the routing of experts, a quantisation scale, a collective",
        "An output that does not follow the batch (a count per expert) is noticed, and such a forward is not padded by "
        "one word. Pad rows that change the caller's rows are not noticed.",
        "verify_failed",
        "no",
        (
            H + "test_a_count_of_tokens_per_expert_is_never_padded_by_one_word",
            H + "test_pad_rows_that_take_the_place_of_rows_are_found_by_verification",
            "tests/test_verify.py::test_padded_calls_are_verified",
        ),
        verify="compares a padded call with eager at the caller's own size, and gives the graph up",
    ),
    Hazard(
        17,
        "Batch statistics and other work across rows",
        "A module in training mode is eager. Running statistics that a layer writes count as a write outside: exact "
        "batches replay and move them once, padding is refused. `x - x.mean(0)` under padding is not noticed.",
        "verify_failed",
        "no",
        (
            H + "test_running_statistics_move_once_per_call_and_never_with_pad_rows",
            H + "test_batch_norm_in_eval_mode_is_padded",
            "tests/test_verify.py::test_padded_calls_are_verified",
        ),
        verify="as 16",
    ),
    Hazard(
        18,
        "A static cache is bound to its batch size",
        'With `static=("cache",)` each cache has its own graph. A batch that does not fit its cache raises what the '
        "model raises, and is not counted; it is never padded into.",
        None,
        "yes",
        (H + "test_a_static_cache_is_bound_to_its_batch",),
    ),
    Hazard(
        19,
        "An argument that the model ignores, `cache_position` for instance",
        "A graph does with it what eager does. The position lives in the cache, in memory that graph and eager share.",
        None,
        "yes",
        (
            H + "test_a_position_that_the_model_ignores_is_ignored_by_the_graph",
            H + "test_a_static_cache_passed_by_reference_gives_eagers_tokens",
        ),
    ),
    Hazard(
        20,
        "What happens once: cuBLAS workspaces, autotuning, modules that are loaded late",
        "Each bucket runs eagerly before its capture (`eager_first`), and `warmup` runs all of them before the first "
        "capture. A capture that fails all the same is tried a second time.",
        "warmup",
        "yes",
        (
            G + "test_eager_first",
            CAPTURE + "test_the_first_matrix_product_of_a_process_may_be_a_captured_forward",
            OUTPUT + "test_a_workspace_has_grown_before_anything_is_captured",
            CAPTURE + "test_a_capture_without_an_eager_run_is_right_or_fails_with_its_cause",
        ),
    ),
    Hazard(
        21,
        "Other threads allocate, pin or ask for events during a capture",
        "Captures run in thread-local mode, one at a time in the process. A call that wants to capture, or to replay "
        "the same forward, meanwhile runs eagerly instead of waiting.",
        "busy",
        "yes",
        (
            G + "test_a_call_during_a_capture_is_not_kept_waiting",
            GPU + "test_another_thread_that_uses_the_device_does_not_break_a_capture",
            THREADS + "test_fifty_captures_succeed_while_others_pin_allocate_and_ask_events",
        ),
    ),
    Hazard(
        22,
        "Our own events are asked for during a capture",
        "Events are read by the thread that serves, at a later sample, and never inside a capture. A snapshot or a "
        "scrape from another thread leaves them alone.",
        None,
        "yes",
        (
            H + "test_no_other_thread_asks_for_an_event",
            THREADS + "test_no_route_calls_torch",
            TIMING + "test_a_timed_forward_inside_somebody_elses_capture_is_not_timed",
        ),
    ),
    Hazard(
        23,
        "Collectives: ranks that capture, replay or run eagerly each for itself",
        "With torch.distributed initialised nothing is captured in traffic, unless `agree=` makes the choice equal on "
        "all ranks or `lazy=True` says that it is. `warmup`, which all ranks run, captures.",
        "distributed",
        "yes",
        (
            H + "test_ranks_that_have_not_agreed_capture_at_warm_up_only",
            H + "test_ranks_that_agree_capture_in_traffic",
            "tests/cases/test_ranks.py::test_ranks_replay_the_agreed_bucket",
            TWO + "test_a_tensor_parallel_forward_is_replayed_by_all_ranks",
        ),
    ),
    Hazard(
        24,
        "autocast keeps casts of weights, made outside the capture or inside",
        "The cache is emptied before a capture and off inside it. autocast with its dtype is part of the signature.",
        None,
        "yes",
        (
            H + "test_no_cast_of_a_weight_is_frozen",
            G + "test_modes_have_their_own_graphs",
            OUTPUT + "test_a_graph_under_autocast_reads_the_weights_of_today",
        ),
    ),
    Hazard(
        25,
        'Nested graphs: torch.compile with `mode="reduce-overhead"` inside the forward',
        "On CUDA the capture fails and calls stay eager, with inductor's own graphs. Plain inductor "
        "(`max-autotune-no-cudagraphs`) is captured. A captured forward inside compiled code is taken apart by the "
        "compiler and counts as `disabled`.",
        "capture_failed",
        "yes",
        (
            H + "test_a_graph_of_inductor_inside_a_capture_is_refused",
            H + "test_inductors_code_inside_a_capture",
            H + "test_a_captured_forward_inside_compiled_code_is_eager",
            GPU + "test_a_compiled_forward_is_captured_compiled",
        ),
    ),
    Hazard(
        26,
        "dynamo compiles anew during a capture",
        "It has compiled in the eager run of the same bucket, unless that run was padded from another size. A capture "
        "that compiling breaks is tried a second time. The recorder runs the code uncompiled.",
        "capture_failed",
        "yes",
        (
            H + "test_a_size_that_is_compiled_at_its_capture",
            H + "test_compiled_code_stays_compiled",
        ),
    ),
    Hazard(
        27,
        "Weights are replaced instead of updated: `.data =`, `assign=True`, `.to()`, adapters, repacking",
        "In-place updates are seen at once; a tensor that its owner lets go of at the next call (`static_moved`). Of "
        "storage under a living tensor one address is compared per graph call, in turn, and all of them every 64 calls "
        "of a batch size. Weights that kernels outside the dispatcher read are not watched.",
        "weights_moved",
        "late",
        (
            G + "test_weights_that_moved_are_noticed_within_the_check",
            G + "test_a_replaced_tensor_is_noticed_at_the_next_call",
            G + "test_weights_loaded_in_place_are_seen_at_once",
            "tests/cases/test_weights.py::test_a_module_that_moves_as_a_whole_is_right_at_the_next_call",
        ),
        bound="the next call where all weights moved, else 64 calls of a batch size",
    ),
    Hazard(
        28,
        "Sharded weights: FSDP, DTensor",
        "A module under FSDP, or a DTensor among the arguments, is never captured (`signature`). A forward that frees "
        "what it reads, as FSDP does layer by layer, is no graph; one on DTensor weights is eager.",
        "capture_failed",
        "yes",
        (
            H + "test_fully_sharded_weights_are_no_graph",
            H + "test_a_forward_that_frees_what_it_reads_is_no_graph",
            H + "test_a_dtensor_is_no_input_of_a_graph",
            H + "test_sharded_weights_give_eagers_results",
        ),
    ),
    Hazard(
        29,
        "Tensors on several devices: offloaded weights, `device_map`",
        "A call with tensors on two devices is eager. A forward that reads a CPU tensor from outside, or fetches its "
        "weights for each call, is no graph (`capture_failed`).",
        "unsupported_device",
        "yes",
        (
            G + "test_a_device_without_graphs",
            H + "test_offloaded_weights_are_no_graph",
            GPU + "test_cpu_work_is_refused_with_a_reason",
            TWO + "test_work_on_a_second_device_is_never_frozen",
        ),
    ),
    Hazard(
        30,
        "The thread's current device is not the model's",
        "Captures and replays run with the device of the inputs; the caller's is the current one afterwards. One "
        "wrapper serves one device.",
        "unsupported_device",
        "yes",
        (
            TWO + "test_the_device_is_that_of_the_inputs",
            TWO + "test_a_wrapper_stays_on_its_first_device",
            GPU + "test_a_wrapper_on_the_current_device_leaves_the_callers_stream_current",
        ),
    ),
    Hazard(
        31,
        "The default stream, side streams that are not joined",
        "A capture has a stream of its own, which waits for the caller's and is waited for. Side streams that the "
        "forward joins are part of the graph; one that it does not join fails the capture.",
        "capture_failed",
        "yes",
        (
            CAPTURE + "test_work_on_a_side_stream_that_is_joined_is_captured",
            CAPTURE + "test_work_on_a_side_stream_that_is_not_joined_is_a_failed_capture",
        ),
    ),
    Hazard(
        32,
        "The replay runs on another stream than the inputs come from",
        "Copies, replay and clones run on the caller's current stream, which waits for the stream of the last replay.",
        None,
        "yes",
        (
            GPU + "test_another_stream_and_another_thread_get_their_own_results",
            THREADS + "test_one_thread_that_changes_streams_never_overlaps_two_replays",
        ),
    ),
    Hazard(
        33,
        "Several threads replay one graph",
        "One thread at a time has the turn over copies, replay and clone; the others wait for it, which is the time "
        "of launching. During a capture they do not wait but run eagerly.",
        "busy",
        "yes",
        (
            G + "test_threads_get_their_own_results",
            "tests/test_routes.py::test_replays_exclude_one_another",
            GPU + "test_another_stream_and_another_thread_get_their_own_results",
        ),
    ),
    Hazard(
        34,
        "Garbage collection destroys another graph during a capture",
        "Collection is off during a capture and as before afterwards. Nothing is collected for each graph.",
        None,
        "yes",
        (
            "tests/test_recorder.py::test_garbage_collection_is_as_before",
            CAPTURE + "test_an_old_graph_is_not_collected_while_another_one_is_captured",
            CAPTURE + "test_a_forward_that_collects_garbage_itself_is_survived",
        ),
    ),
    Hazard(
        35,
        "A capture fails half-way: stream, pool, random numbers, state",
        "Everything is put back, the same call is served eagerly, the first cause is kept; after two failures the "
        "bucket is given up. Other buckets and wrappers go on.",
        "capture_failed",
        "yes",
        (
            G + "test_a_failed_capture_goes_on_serving_and_is_bounded",
            G + "test_a_failed_capture_leaves_no_trace",
            GPU + "test_a_failed_capture_leaves_stream_allocator_and_later_captures_intact",
            CAPTURE + "test_twenty_buckets_that_fail_hold_no_more_than_one",
        ),
    ),
    Hazard(
        36,
        "Out of memory while capturing",
        "The bucket is given up at once (outcome `oom`); the others are captured where they fit, and serve.",
        "capture_failed",
        "yes",
        (
            "tests/cases/test_capture_failure.py::test_an_out_of_memory_is_not_tried_again",
            GPU + "test_out_of_memory_keeps_the_buckets_that_fit",
            CAPTURE + "test_a_bucket_that_does_not_fit_is_said_to_be_out_of_memory",
        ),
    ),
    Hazard(
        37,
        "What the graph reads is freed after the capture",
        "Inputs are the graph's own. A tensor from outside is watched by a weak reference: when its owner lets it go, "
        "the next call is eager and the graph is made anew, three times in a row at most.",
        "static_moved",
        "yes",
        (
            G + "test_a_replaced_tensor_is_noticed_at_the_next_call",
            G + "test_a_tensor_that_is_replaced_again_and_again_leaves_its_bucket_eager",
            OUTPUT + "test_a_workspace_that_grows_in_traffic_ends_the_graphs_that_read_it",
        ),
    ),
    Hazard(
        38,
        "Hooks on layers, prints and metrics inside the forward stop running",
        "Hooks of the captured module itself run at each call. Hooks below it do not run in a replay, what they launch "
        "does: they are named once in the log.",
        None,
        "late",
        (
            H + "test_hooks_below_the_forward_are_named_where_a_graph_passes_them_by",
            "tests/test_graphed.py::test_hooks_of_a_module_run_at_every_call",
            "tests/cases/test_modules.py::test_hooks_inside_a_graph_are_named_and_those_outside_fire",
            "tests/cases/test_modules.py::test_a_hook_that_comes_after_the_capture_is_noticed",
        ),
        bound="at the capture; a hook that is put on later: 64 calls of a batch size, at most ten looks a second",
    ),
    Hazard(
        39,
        "A copied or pickled module keeps the original's forward, and so its weights",
        "`copy.deepcopy` and pickle give the copy graphs of its own on its own weights. A shallow copy calls the "
        "original's, until a weight of it is replaced.",
        None,
        "yes",
        (
            "tests/test_graphed.py::test_a_copy_has_its_own_graphs_on_its_own_weights",
            "tests/test_graphed.py::test_an_engine_copies_and_pickles",
            "tests/test_graphed.py::test_a_shallow_copy_runs_on_its_own_weights",
            "tests/cases/test_modules.py::test_graphs_are_dropped_from_a_pickle",
        ),
    ),
    Hazard(
        40,
        "The process forks after a capture",
        "The child never touches the parent's graphs, counts from zero and runs eagerly; the parent goes on.",
        "forked",
        "yes",
        (G + "test_a_forked_child_runs_eagerly",),
    ),
    Hazard(
        41,
        "The caching allocator is off, or another one is in its place",
        "Without the caching allocator nothing is captured. With `cudaMallocAsync` graphs serve, and `pool_bytes` is "
        "unknown.",
        "capture_failed",
        "yes",
        (H + "test_another_allocator_gives_eagers_results",),
    ),
    Hazard(
        42,
        "A batch above the largest bucket, of no rows, or along another dimension",
        "Above: eager, and named at once where `max_batch` is given. No rows: `empty_batch`. `batch=` and "
        "`batch_dims=` say where the batch size stands.",
        "batch_too_large",
        "yes",
        (
            G + "test_exact_buckets",
            G + "test_empty_batch",
            G + "test_where_the_batch_size_is_read",
            "tests/test_bad_input.py::test_batch_above_the_largest_bucket",
        ),
    ),
    Hazard(
        43,
        "Padding costs more than it saves",
        "There is no limit: padding is off by default, the rows added are counted per bucket, and the table names the "
        "bucket that would save most.",
        None,
        "yes",
        (
            G + "test_padding",
            "tests/test_table.py::test_advice",
            "tests/test_demo.py::test_padding_gets_advice_of_its_own",
        ),
    ),
    Hazard(
        44,
        "A capture stops the process for others: it synchronises and empties the allocator's cache",
        "A capture waits for the device once and empties no cache (`reset()` does). `warmup` captures before traffic "
        "and closes the set.",
        "not_captured",
        "yes",
        (
            H + "test_a_capture_empties_no_cache",
            G + "test_warmup_reports_and_closes_the_set",
            CAPTURE + "test_fifty_captures_collect_garbage_twice_at_most",
        ),
    ),
)

INTRO = """# Hazards

What can go wrong when an arbitrary forward is captured, what graphprobe does about it, and the test that shows it.
Made by `docs/hazards.py`, which holds the rows as data; [limits.md](limits.md) tells the same from the user's side.

- Reason: the fallback reason under which eager calls for it are counted; a dash where none are.
- Seen: **yes** is handled, or noticed before a result is wrong; **late** is noticed within the bound that stands there;
  **no** is not noticed, and the row says what `verify=` does about it.
- Tests of `tests/gpu` and a few of `tests/test_hazards.py` need a CUDA device and skip without one.
"""


def seen(row: Hazard) -> str:
    """The cell that says whether it is noticed."""
    more = {"late": row.bound, "no": f"`verify=` {row.verify}"}.get(row.detected, "")
    return f"{row.detected}: {more}" if more else row.detected


def shown(test: str) -> str:
    """A node id, with the file as a link."""
    file, name = test.split("::")
    return f"[{name}](../{file})"


def page() -> str:
    """The whole page."""
    lines = ["| # | hazard | what graphprobe does | reason | seen | test |", "| --- | --- | --- | --- | --- | --- |"]
    for row in HAZARDS:
        reason = f"`{row.reason}`" if row.reason else "-"
        tests = "<br>".join(shown(test) for test in row.tests)
        lines.append(f"| {row.number} | {row.hazard} | {row.does} | {reason} | {seen(row)} | {tests} |")
    return INTRO + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
