"""Set-up of a communicator: processes, sockets, memory of peers, backends."""
