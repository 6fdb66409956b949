"""Local checkpoints on several nodes: each node's folder has the files of its own ranks, and the manifest of all.

    nodes.py      the ranks of a node, and groups of ranks that keep copies of each other's files
    transfer.py   a file goes from the folder of one rank to the folders of others
    save.py       ranks write to their node's folder -> copies on other nodes (--replication) -> every node has its files and
                  the manifest, together they have all files -> every node renames the folder
    load.py       a manifest that rank 0 has -> to nodes without it -> files that a rank reads and its node lacks -> from a node
                  that has them; a file that does not match its checksums is copied again from a node on which it does

    iter_0000100/node_files.json   names of the files that the node has

Ranks that see each other's files are on one node, so that storage which several nodes share counts as one.

Source: Megatron-LM and nvidia-resiliency-ext (checkpointing/local/replication), for the flags and the groups of copies.
"""
