"""What the strategies of both adapters share: arguments, ranks and mesh, checkpoints, launch.

Lightning's Trainer and Fabric know two unrelated strategy classes. Whatever does not depend on which of them asks is
written here once; the adapters in :mod:`lightning_par.trainer` and :mod:`lightning_par.fabric` answer its hooks.
"""
