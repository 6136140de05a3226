"""Mutations of `hvdtrain/engine/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("engine/in_all_copies.py", "tests/training/test_step.py", "tests/laws/test_laws.py"): {
        "the exchange starts one micro-batch too early": (
            "        if not self.schedule.left:\n",
            "        if self.schedule.left <= 1:\n",
        ),
    },
    ("engine/fsdp_collectives.py", "tests/engine/test_fsdp_collectives.py"): {
        "an owner computes with parameters that are not rounded, unlike the other ranks": (
            "                coding.decode(received, out.view(comm.size, -1))\n",
            "                kept = own.clone()\n"
            "                coding.decode(received, out.view(comm.size, -1))\n"
            "                own.copy_(kept)\n",
        ),
        "torch copies gradients to the host before their sum has arrived": (
            "if is_another or self._copied:",
            "if is_another:",
        ),
    },
    ("engine/groups.py", "tests/engine/test_fsdp_engine.py"): {
        "groups of ranks exchange the gradients of each pass instead of their sum": (
            "if self._schedule.left or self._runs[module] != 1:",
            "if self._runs[module] != 1:",
        ),
    },
    ("engine/saved_exchange.py", "tests/engine/test_saved_exchange.py"): {
        "a resume gives each rank the mean of the residuals": (
            "tensor[ranks.index(comm.rank)] if len(ranks) == len(tensor) else tensor.mean(0)",
            "tensor.mean(0)",
        ),
    },
    ("engine/base.py", "tests/laws/test_sharded.py"): {
        "a parameter that was frozen is still waited for": ("        self.sums.refresh()\n", ""),
        "with ZeRO-2, passes are summed into each other": (
            "        if self.schedule.begun:\n",
            "        if not self.schedule.begun:\n",
        ),
        "ranks keep their old copies of what another rank has updated": (
            "        self.optimizer.step()\n        self.sums.spread()\n",
            "        self.optimizer.step()\n",
        ),
        "a resumed optimizer in the memory of the host starts from other parameters": (
            "        self.sums.before_load(values)\n",
            "",
        ),
    },
    ("engine/base.py", "tests/engine/test_make.py"): {
        "the hooks of a pipeline outlive its engine": ("        self.schedule.close()\n", ""),
    },
    ("engine/one_rank.py", "tests/exchange/test_residual_transfer.py"): {
        "one rank delivers the mean of residuals instead of their sum": (
            ".to(parameter.device) * self._residuals.ranks",
            ".to(parameter.device)",
        ),
        "a skipped step loses the residuals that it was to deliver": (
            "        if applied and self._delivered:",
            "        if self._delivered:",
        ),
    },
    ("engine/in_all_copies.py", "tests/training/test_auto_compression.py"): {
        "a resumed run decides for no compression before it has measured": (
            '        if self.undecided and values.get("compression"):\n',
            "        if self.undecided:\n",
        ),
    },
    ("engine/among_copies.py", "tests/training/test_unused_parameters.py"): {
        "weight decay moves parameters that other ranks use": ("        self._used.add(name)\n", ""),
    },
    ("engine/among_copies.py", "tests/exchange/test_residual_transfer.py"): {
        "with ZeRO-2 each pass delivers the residual again": ("            self._owed.discard(name)\n", ""),
    },
    ("engine/among_copies.py", "tests/engine/test_own_loop_state.py"): {
        "a residual of the drop-in is delivered as if it were a gradient of one rank": (" / self._weight\n", "\n"),
    },
    ("engine/among_copies.py", "tests/laws/test_sharded.py"): {
        "a rank with fewer micro-batches stops taking part in sums": (
            "int(self._most.wait().max())",
            "int(self._most.wait().min())",
        ),
        "a replayed pass begins an exchange": (
            "        if self._is_running and is_last and self._overlaps",
            "        if is_last and self._overlaps",
        ),
    },
    ("engine/sharded.py", "tests/laws/test_sharded_compression.py"): {
        "each rank delivers what all owe together": (
            "return self._comm.rank == 0 and name in self.exchanges",
            "return name in self.exchanges",
        ),
    },
    ("engine/sharded.py", "tests/laws/test_sharded.py"): {
        "a program gets its optimizer back without the parameters it has added": (
            '            before += [p for p in group["params"] if p in added]\n',
            "            before += []\n",
        ),
        "a parameter without elements is waited for": ("p.requires_grad and p.numel()}", "p.requires_grad}"),
    },
    ("engine/divisible.py", "tests/laws/test_sharded.py"): {
        "an own optimizer gets elements of a matrix as a vector": (
            '.startswith(("torch.optim.", "hvdtrain."))',
            '.startswith("")',
        ),
    },
    ("engine/mesh.py", "tests/parallel/test_families.py"): {
        "what each rank has a part of is summed as if it were whole": (
            '        if name in self._partial:\n            return "partial"\n',
            "",
        ),
    },
    ("engine/gathers.py", "tests/engine/test_gathers.py"): {
        "all parameters are gathered at once, whatever memory they take": (
            "            if self._running and length > self._limit_bytes:\n                return\n",
            "",
        ),
    },
    ("engine/gathers.py", "tests/laws/test_sharded.py"): {
        "a parameter that another module uses is read before it has arrived": (
            "        self._is_first, self._is_watching = bool(bucket_of), False\n",
            "        self._is_first, self._is_watching = False, False\n",
        ),
    },
    ("engine/divisible.py", "tests/engine/test_divisible.py"): {
        "the norm counts what two ranks hold twice": ("(squared_norm(held) / holders)", "squared_norm(held)"),
    },
    ("engine/divisible.py", "tests/training/test_unused_parameters.py"): {
        "a residual of a parameter that nobody uses is thrown away": (
            "            if each is not None and not of_residual:\n",
            "            if each is not None:\n",
        ),
    },
    ("engine/styles.py", "tests/engine/test_styles.py"): {
        "ranks divide the side of an adapter that they have whole": (
            '{"colwise": "lora_B", "rowwise": "lora_A"}',
            '{"colwise": "lora_A", "rowwise": "lora_B"}',
        ),
    },
    ("engine/refusals.py", "tests/engine/test_pipeline_fsdp.py"): {
        "FSDP is started where each stage has one copy": (
            "if together == dimensions.tp * dimensions.pp:",
            "if together == dimensions.tp:",
        ),
    },
    ("engine/refusals.py", "tests/engine/test_pipeline.py"): {
        "virtual stages without blocks are accepted": (
            "if count < dimensions.pp * chunks:",
            "if count < dimensions.pp:",
        ),
    },
    ("engine/stages.py", "tests/engine/test_pipeline.py"): {
        "the last stage lacks embeddings that its head uses": ("(0, last) if is_after else (0,)", "(0,)"),
        "the last stage gets as many blocks as others, and the LM head": ("works[-1] += work(", "work("),
    },
    ("engine/schedule.py", "tests/engine/test_pipeline.py"): {
        "virtual stages draw other numbers before the blocks": (
            "with nullcontext() if is_last else torch.random.fork_rng",
            "with nullcontext() if True else torch.random.fork_rng",
        ),
        "the exchange of a virtual stage begins before its last pass": (
            "self.left = left[chunk]\n",
            "self.left = left[0]\n",
        ),
    },
    ("engine/token_exchange.py", "tests/engine/test_token_exchange.py"): {
        "gradients of tokens go to other ranks than the tokens came from": (
            "return ctx.exchange(gradients[0], ctx.received, ctx.given)",
            "return ctx.exchange(gradients[0], ctx.given, ctx.received)",
        ),
        "tokens get the results of each other": (
            "torch.empty_like(back_PD).index_copy(0, order_P, back_PD)",
            "back_PD",
        ),
    },
    ("engine/sequence.py", "tests/task/test_sequence.py"): {
        "parts of a sequence are joined along their heads": (".unbind(), joined)", ".unbind(), split)"),
    },
    ("engine/coded_shards.py", "tests/laws/test_sharded_compression.py"): {
        "a program gets rounded parameters at the end": (
            "                bucket.gather_exactly()\n",
            "                pass\n",
        ),
    },
    ("engine/outer.py", "tests/laws/test_workers.py"): {
        "what the coding of changes loses is lost": (
            "            self._coding.add(payload, residual, -1.0)\n",
            "            residual.zero_()\n",
        ),
        "the outer momentum is not Nesterov's": (
            "update = update.add_(velocity, alpha=plan.momentum)",
            "update = velocity",
        ),
    },
}
