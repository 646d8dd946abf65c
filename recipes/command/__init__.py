"""The program `command`: a script of the user's own, as its job file says (rows G2, H6).

It is given a folder with its source files, one for checkpoints that outlives a restart and the machine, its dataset, and the
tracking run, all by variables of its environment. What ends by a signal is started again; a script's own error is not.

`job` is what its file may say, `program` what becomes of it. It is given `folders` and an `environment`, `process` and `end`
are its life and its last words. Of its checkpoints, `look` sees what is there, `saving` says when a state is made, `taking`
makes it, `states` keeps the last ones, `storing` waits for a store that is away. Several nodes: `parts`, `together`.
"""
