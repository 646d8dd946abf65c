"""Files that lie in the object store: where, whose, and with which checksum."""
