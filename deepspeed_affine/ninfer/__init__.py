"""The NInfer v3 container: directory, layouts, formats, reader, writer, and bindings as maps."""
