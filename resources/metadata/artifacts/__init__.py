"""Files in the object store: location, owner and checksum."""
