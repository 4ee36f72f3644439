"""The manual of every code: what it means and what mends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    title: str
    text: str
    cure: str


CODES: dict[str, Entry] = {
    "E100": Entry(
        "a file can't be read",
        "The path leads nowhere, to a folder, or to what is not UTF-8 text.",
        "Give the path of a schedule, or the name of a shipped one.",
    ),
    "E101": Entry(
        "this is not YAML",
        "The file can't be taken apart into keys, values and lists.",
        "Look at brackets, quotes and indentation there and in the line above; indent with spaces.",
    ),
    "E102": Entry(
        "unknown key",
        "A key that the language does not have at this place; nothing is ignored silently.",
        "Take the nearest known key, or leave it out. `stepgraph explain KIND` lists the fields of an op.",
    ),
    "E103": Entry("wrong value", "The value is of another type, or out of its range.", "Write what is expected there."),
    "E104": Entry("missing key", "A key that must be there is not.", "Add it."),
    "E105": Entry("duplicate key", "A map has a key twice; parsers disagree on which one counts.", "Take one out."),
    "E106": Entry(
        "a value that means two things",
        "YAML 1.1 reads `no` as false, `1:30` as 90 and `010` as 8; others read them as text or as numbers. "
        "`y` and `n` are names here.",
        "Write true or false, write numbers in decimal, or quote names.",
    ),
    "E107": Entry(
        "a feature of YAML that schedules don't have",
        "Anchors, aliases, merge keys, tags, several documents.",
        "Write the value out.",
    ),
    "E108": Entry(
        "too large",
        "A file is at most 1 MiB, 50 levels deep, and holds at most 100,000 values.",
        "Use `layers` and `each` to repeat ops.",
    ),
    "E109": Entry(
        "a setting is not PATH=VALUE",
        "`--set` takes dotted paths through maps, separated by commas.",
        "Write it as --set model.layers=2,shape.seq=96.",
    ),
    "E150": Entry("not a plan", "The file can't be read, is cut off, or is another document.", "Compile the schedule."),
    "E151": Entry(
        "a plan of another version",
        "Plans are read by the version that wrote them.",
        "Compile the schedule again; the plan holds its text.",
    ),
    "E152": Entry(
        "not what was hashed",
        "The plan was changed after it was written.",
        "Compile the schedule again; or, where it was edited on purpose, give the command --edited.",
    ),
    "E153": Entry(
        "a plan that does not follow its schema",
        "A field is missing, unknown or of another type.",
        "Compile the schedule again.",
    ),
    "E154": Entry(
        "a reference that leads nowhere",
        "An index or a region lies outside of what it refers to.",
        "Compile the schedule again.",
    ),
    "E155": Entry(
        "a version that is not there",
        "A plan set has a plan for each variant and each bucket of its schedule, and no other.",
        "Take the nearest name.",
    ),
    "E156": Entry(
        "a plan that does not fit its schedule",
        "A plan carries the schedule that it was compiled from, and runs are held against the unsharded model that the "
        "schedule says. The plan was edited, and its source, ops, inputs or outputs are those of another one.",
        "Edit instructions and memory alone, or compile the schedule again.",
    ),
    "E201": Entry(
        "read before it exists",
        "No op above makes a tensor of this name, and it is no input. Inside `each`, "
        "x means x.img if there is one, else the shared x.",
        "Look at the nearest name, or move the op down.",
    ),
    "E202": Entry(
        "never read",
        "A tensor, input or size that nothing uses: work for nothing, or a misspelt reader; or a state that is never "
        "read or never written. Told only where nothing else is wrong.",
        "Take the op, input, size or state out, or use it.",
    ),
    "E203": Entry(
        "placements that don't go together",
        "A tensor is placed by sequence, by head, or is replicated, and "
        "may be a partial sum. Replicated operands join any; other mixtures are errors.",
        "Put a send, gather, shard, all_gather or all_reduce before the op.",
    ),
    "E204": Entry(
        "shapes that don't go together",
        "Operands differ in rows or features, or an op needs heads.",
        "Compare the two shapes that the message gives.",
    ),
    "E205": Entry(
        "heads fewer than ranks",
        "Every Ulysses rank needs a head of q. Sequences may have empty shares.",
        "Take fewer ulysses ranks, and use another axis for the others.",
    ),
    "E206": Entry(
        "a send and its barrier",
        "A send is closed by a barrier in the same list, before its name is defined anew, and before the state that it "
        "goes into is used; a barrier closes at least one send; a send via nccl needs none.",
        "Write `barrier: true` on the last send of the group, or `barrier: all` after it.",
    ),
    "E207": Entry(
        "a block, stream or state that is not there",
        "Blocks stand under `blocks`, streams under `streams`, states under `state`.",
        "Take the nearest name.",
    ),
    "E208": Entry(
        "a wrong number of operands",
        "The op takes or gives another number of tensors, or lacks its name.",
        "See `stepgraph explain KIND`.",
    ),
    "E209": Entry("one name for two ops", "Names identify weights and bindings within a block.", "Rename one."),
    "E210": Entry(
        "tensor parallelism that does not fit",
        "Sizes are cut evenly over `tensor`; a column split makes features that are cut, and a row split takes them.",
        "Pair a column split with a row split.",
    ),
    "E211": Entry(
        "a size that is not there",
        "A shape is made of numbers and of the names batch, hidden, heads, kv_heads, "
        "head_dim, ffn, the named lengths of seq, and the other names under `shape`.",
        "Take the nearest name.",
    ),
    "E212": Entry(
        "an output that can't be handed out",
        "Outputs are whole on every rank at the end of the step.",
        "End the step with an all_gather.",
    ),
    "E213": Entry(
        "a state where it can't be",
        "A state has a name of its own. One with `per: layer` is used in blocks that `layers` repeats. An op writes a "
        "state whole, as its one result or in place; `keep` copies any tensor into one; a send into one goes by copy.",
        "Name the result otherwise and `keep` it.",
    ),
    "E214": Entry(
        "a variant or size that is not there",
        "`after` names variants of the same schedule, and a bucket gives values for sizes of `shape`.",
        "Take the nearest name.",
    ),
    "E215": Entry(
        "several versions where one is wanted",
        "The schedule has variants or buckets: each is a plan of its own.",
        "Choose one with --variant and --bucket, or compile all of them to a plan set.",
    ),
    "E216": Entry(
        "branches of guidance that don't go together",
        "With `cfg`, all ops up to the step's last guide are done for both branches: on ranks of their own (parallel), "
        "in one batch (batch) or one after the other (sequential). They see inputs and what they make themselves; what "
        "comes behind the guide sees inputs that both branches share, and what guides have made.",
        "End the branches with `guide: {in: noise, scale: guidance, out: noise}`, and make behind it what is left.",
    ),
    "E217": Entry(
        "chunks that don't fit",
        "`chunks` cuts one run of ops by heads: sends, the barrier behind them, the attention, its gathers. Every rank "
        "needs a head of q in every chunk. What is cut is read by the attention and the gathers alone.",
        "Take fewer chunks, or move other readers before the sends or behind the gathers.",
    ),
    "E301": Entry(
        "race on a target",
        "Two ranks touch the same bytes of a target, one of them writing, and nothing orders them within a replay. A "
        "state has one target: a send into it must come behind an exchange that all its earlier users enter.",
        "Let an exchange lie between them: more buffers, or a gather before the next send.",
    ),
    "E302": Entry(
        "race on local memory",
        "Two streams of a rank touch the same bytes of a tensor, one of them writing, and nothing orders them.",
        "Let the second wait for an event that is recorded after the first.",
    ),
    "E303": Entry(
        "race at the wrap",
        "As E301 or E302, between the end of one replay and the start of the next, when ranks run ahead of each other.",
        "End the step with an exchange that all readers enter after their reads.",
    ),
    "E304": Entry(
        "dropped too early",
        "A tensor's memory is given back while an op still uses it, or before one does, or twice, or on another stream "
        "than the one on which it was made: the next allocation there may take it at once.",
        "Drop it once, where its own stream has waited for all readers.",
    ),
    "E305": Entry(
        "too few buffers",
        "With so few targets in turn, a rank could write a layer's data over data of an "
        "earlier layer that a peer still reads: no exchange lies between.",
        "Write `buffers: auto`, or put a gather between the read and the next send.",
    ),
    "E306": Entry(
        "data overwritten before it is read",
        "Two targets share bytes, and one is written while the other still holds what is to be read; or a later op has "
        "written over what a reader's operand names; or an op writes a state that it does not name; or a copy, or a "
        "stage that changes something in place, writes over what it reads.",
        "Place the two targets apart, as the planner does, and keep the order in which ops need one another.",
    ),
    "E307": Entry(
        "data read before it is written",
        "A read of memory, other than that of a state, that nothing has written in the same replay, or not yet the op "
        "that the reader's operand names; or sends of an op that fill a part of their target; or a state that "
        "the reader does not name, or that no version writes.",
        "Send, load or compute every part of it before.",
    ),
    "E308": Entry(
        "an op left out or done twice",
        "An op that makes something is carried out by no rank, or by one rank twice; or a rank leaves out one that "
        "leaves a state for the next replay.",
        "Give every rank one instruction of it.",
    ),
    "E401": Entry(
        "deadlock",
        "Instructions wait for each other in a circle, or for what never comes.",
        "Look at the instructions that the message names.",
    ),
    "E402": Entry(
        "unordered exchanges",
        "Two handshakes or collectives of a rank are on two streams with no order by events of the rank, or several "
        "ranks may wait in one before they signal. Hardware queues may run streams one after another in either order, "
        "and differently on each rank: then they wait for each other for ever.",
        "Put them on one stream, or let the second wait for the first.",
    ),
    "E403": Entry(
        "exchanges in different orders",
        "Two ranks that share two exchanges enter them in different orders.",
        "Issue exchanges in one order on all ranks.",
    ),
    "E404": Entry(
        "a flag that does not match",
        "A flag word has one writer, one wait and one reset in a replay, in the owner's order wait, reset; a kernel "
        "handshake has no reset. Each rank waits once in a handshake, and in one by a kernel signals once before.",
        "Give every handshake of a step words of its own.",
    ),
    "E405": Entry(
        "a flag written too early",
        "The next replay's write of a flag may come before its reset, and is then lost.",
        "Add a second exchange of the same ranks to the step, or a closing handshake.",
    ),
    "E406": Entry(
        "a member that stays away",
        "Every member of a group takes part in its exchanges once a replay, also with an empty share.",
        "Let it signal and wait like the others.",
    ),
    "E407": Entry(
        "an event out of turn",
        "An event is recorded once, and waited for after that in the order of issue.",
        "Take a fresh event for each edge.",
    ),
    "E408": Entry(
        "a stream outside of the capture",
        "A stream enters a capture by waiting for an event of a stream that is in it; this one works before.",
        "Let it wait for an event of the origin first.",
    ),
    "E409": Entry(
        "a stream that is not joined",
        "A capture ends on the origin, which must have waited for everything.",
        "Let the origin wait for an event recorded at the stream's end.",
    ),
    "E410": Entry(
        "a copy that its exchange does not close",
        "A send names the handshake that closes it. It comes before its rank signals there, goes to a member, and is "
        "read behind the wait there: some transports deliver it at that wait, and not before.",
        "Let the send name the handshake that comes behind it and before its readers.",
    ),
    "E601": Entry(
        "a device that is not there",
        "The device can't be used on this machine or in this version.",
        "`stepgraph doctor` tells what is missing; the cpu device runs everywhere.",
    ),
    "E602": Entry(
        "a stage that can't be made up",
        "A `call` whose operands are cut over ranks and differ in width from "
        "its outputs has no made-up stage that agrees with the unsharded model.",
        "Bind the model's own.",
    ),
    "E604": Entry("the session is closed", "A step or session was used after it was closed.", "Open another."),
    "E605": Entry(
        "an input of another kind",
        "A step takes what its plan was compiled for: shape, dtype, device, contiguous. Or an argument of a session is "
        "of another type or outside its range.",
        "Compare expected and got; cast or compile for other sizes.",
    ),
    "E606": Entry(
        "something that the device or the group can't do",
        "A transport that some rank lacks, too little memory, an error of CUDA, too many ranks for a kernel handshake, "
        "or a rank alone whose plan has collectives.",
        "Take another transport or handshake, or exchanges via copy.",
    ),
    "E607": Entry(
        "ranks that disagree, or one that failed",
        "The ranks of a group were started with different plans, versions or modes, are too many or too few, or "
        "another rank has failed, whose own error tells more.",
        "Start one process a rank, all with the same plan.",
    ),
    "E608": Entry(
        "a captured graph that differs from the plan",
        "Reading the CUDA graph back after capture found a copy or handshake that is not there with its parameters, a "
        "node that nobody planned, or an order without a path.",
        "Report it with the plan: the capture has lost work.",
    ),
    "E609": Entry(
        "a parameter or layer that was exchanged",
        "A captured step reads weights and buffers where they were when it was captured, and repeats what its layers "
        "did then. One was swapped, offloaded or dropped since, or a hook, an adapter (LoRA) or an attention backend "
        "was set or taken away. On the cpu device the same is an error.",
        "Change weights in place, or open a new session; close() of a wrapped model lets its next call do so.",
    ),
    "E610": Entry(
        "a stage that fails",
        "A stage raised an error when it was made, run or captured, or gave tensors of another number, size, dtype or "
        "device than its op makes. Under capture a stage can't wait for the GPU, allocate symmetric memory, or draw "
        "from a random generator of its own.",
        "Mend the stage of the op that is named; `stepgraph run --eager` runs it without capture.",
    ),
    "E611": Entry(
        "a self-test that fails",
        "Before a session is handed out, its group maps its memory, and runs a step and two replays within a time "
        "limit. Memory could not be mapped, or a step did not end; its waits were released, and the next transport is "
        "tried. Where even that does not end a step, the processes have to.",
        "`stepgraph doctor` tells of transports; `--set defaults.handshake=copy` takes another handshake.",
    ),
    "E613": Entry(
        "an interleaving that does not fit",
        "The file is no interleaving, or one of another plan, or the run can't take its turns: a rank waits, or its "
        "loop has ended.",
        "Write it again with `stepgraph verify PLAN --counterexample FILE`; give the run enough --steps.",
    ),
    "E615": Entry(
        "a request that no bucket takes",
        "The shapes of a plan set are known ahead. A request takes the bucket of its sizes, or one that is larger in "
        "sizes that may be padded.",
        "Pad the request, or add a bucket to the schedule.",
    ),
    "E614": Entry(
        "a variant out of turn",
        "A variant comes only after those that its `after` names; the first variant begins a request, and may come "
        "at any time.",
        "Run the first variant, or one that the variant may follow, before it.",
    ),
    "E612": Entry(
        "a rank that died",
        "The process of a rank ended before it had a result.",
        "Its own output, above, tells why; a rank that ran out of memory is often killed without a word.",
    ),
    "E620": Entry(
        "a binding that does not fit",
        "The schedule and the module that its ops are bound to differ: layers, sizes or dtype, an op without a stage, "
        "a stage without an op; or the module was changed (a cache, another attention processor, hooks, context "
        "parallelism, dropout in train mode) in a way that no op computes, or is elsewhere than the session. All "
        "mismatches are told at once, before anything is captured.",
        "`stepgraph init --from CLASS` writes a schedule with the sizes of a class; `settings_of(model)` gives those "
        "of a module as overrides.",
    ),
    "E621": Entry(
        "an argument that a wrapped model can't honour",
        "A call of a wrapped model has an argument that no op of its schedule reads, such as a LoRA scale or residuals "
        "of a ControlNet, or one of a form that the plan does not take. Nothing is ignored silently.",
        "Leave it out, or call the model itself.",
    ),
    "E622": Entry(
        "a class without a binding",
        "Some classes of diffusers are bound by stepgraph; for another the author says what each op computes.",
        "docs/bindings.md shows how to write a binding.",
    ),
    "E623": Entry(
        "a compiled stage that changes numbers",
        "A stage that went through torch.compile was held against itself on random numbers before it is used, and "
        "differs by more than roundings.",
        "Take the op out of `compiled`.",
    ),
}
